"""Processes: start and end them, call functions in them, limit their time, note who owns a folder, handle signals."""

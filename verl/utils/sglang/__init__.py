"""SGLang: its installed parts, its import, and our patches."""

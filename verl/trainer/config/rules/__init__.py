"""The rules between values of a configuration, by subject. Each yields violations; none imports torch."""

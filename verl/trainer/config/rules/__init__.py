"""The rules between values of a configuration, by subject. Each yields what is wrong; none imports torch."""

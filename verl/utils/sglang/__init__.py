"""SGLang: what of it is installed, its import, and the patches of it."""

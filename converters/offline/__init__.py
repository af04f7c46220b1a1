"""Plans and units of conversions that need no model, GPU or process group."""

"""Checks that this package's results equal Hugging Face's; the product never imports them."""

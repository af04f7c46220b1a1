"""One report for every ``verify`` command: JSON, and a page that needs no other file."""

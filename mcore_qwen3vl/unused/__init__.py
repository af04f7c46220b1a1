"""What a user hands over and nothing uses: it is named, never dropped without a word.

``fields`` says what one is, for whoever reads a file, a record or an archive; ``folder`` holds the
table of the files of a model's folder, and is above all that read one.
"""

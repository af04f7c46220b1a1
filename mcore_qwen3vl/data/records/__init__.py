"""From what a file holds to a conversation: records, media, chat template, bad samples."""

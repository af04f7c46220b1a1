"""From a record in a file to a conversation: formats, media, chat template, bad samples."""

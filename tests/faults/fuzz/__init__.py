"""What hypothesis changes in sound files, along the grammar of each format."""

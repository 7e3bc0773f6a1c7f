"""What a checkpoint folder is: its headers, its side files, its manifest, and how a new one is made."""

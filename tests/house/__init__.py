"""What the folders of kconv look like from their imports: `python -m tests.house`."""

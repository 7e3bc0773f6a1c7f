"""Text as it may be shown: without control characters, without credentials."""

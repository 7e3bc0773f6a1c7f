"""Where bytes lie: local files, the Hub, direct writes, hashes; which names are safe, and JSON and YAML read strictly."""

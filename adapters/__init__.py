"""State-dict adapters: tables that join the names of two layouts, one file a family."""

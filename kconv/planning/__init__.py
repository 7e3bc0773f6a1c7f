"""A conversion as a value: rules, the edges they expand to, and the checked plan."""

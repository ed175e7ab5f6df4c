"""From requests to compiled programs and back."""

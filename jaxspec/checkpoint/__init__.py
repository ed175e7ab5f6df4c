"""What a converted checkpoint's directory holds, and what a model's name means."""

"""What the name of a model or a drafter means, and files of other projects (`layouts`)."""

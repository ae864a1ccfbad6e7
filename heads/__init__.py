"""What is trained, and nothing else: prediction heads, their losses and their file format."""

"""How guesses become text: trees of guesses, one verifying forward, exact acceptance."""

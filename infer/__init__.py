"""How guesses become text: trees of guesses, one verifying forward, exact acceptance."""

from headstart.infer.report import Report
from headstart.infer.speculator import Speculator

__all__ = ["Report", "Speculator"]

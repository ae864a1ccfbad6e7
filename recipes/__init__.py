"""Training recipes and the small data they need; read with ``importlib.resources.files("headstart.recipes")``."""

"""The modules behind the ``headstart`` command."""

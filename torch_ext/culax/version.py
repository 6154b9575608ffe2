"""The version: read by the build and by ``culax.__version__``."""

__version__ = "0.1.0"

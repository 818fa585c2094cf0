"""gagar_mini: group-wise grading and advantage redistribution, small and complete."""

__version__ = "0.1.0"

"""Tracing: masks from the functions that FlexAttention takes."""

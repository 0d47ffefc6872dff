"""Devices, rectangles of them, how a call is spread over one, and the text notation of all that."""

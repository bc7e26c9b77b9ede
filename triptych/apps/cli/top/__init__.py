"""The terminal view of `triptych top`."""

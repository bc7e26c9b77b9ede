"""Measuring: settings of a run, one window of load, its figures and verdict, the search for a rate."""

"""Eviction in the store: which policy loses the fewest seconds of encoding under too little memory."""

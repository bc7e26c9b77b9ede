"""A cluster in virtual time: the real decisions, with delays in place of compute and IO."""

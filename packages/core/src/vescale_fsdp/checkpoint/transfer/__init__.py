"""Who writes and reads what; ranks that agree; loads of all or nothing."""

"""Station 6a, one set a process. In: records. Out: a file, a log line, the flight recorder, a mailbox."""

"""What a process tells about itself: its activity, the records that nxd-top reads, the log of compilations, memory, metrics."""

"""Steps: the executor that runs pending segments, transfers between host and device, step ends, prefetching, abstract runs, and whole files."""

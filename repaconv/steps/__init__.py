"""What the stages are made of: a run's subject, its exports, graphs proved, links run, inputs chosen."""

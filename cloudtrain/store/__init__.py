"""Keep the run folder: its layout, its records, and what is staged for a run."""

"""`megatron-muon report`: a page with tables and plots on runs."""

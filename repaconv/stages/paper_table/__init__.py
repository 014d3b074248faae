"""`table`: compare the parameters and MACs in a paper's tables with ours."""

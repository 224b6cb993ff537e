"""What `bench.train_gpt` trains, and what it says of that."""

"""The way over from other SDKs: their words, made into ours. Nothing else of cloudtrain imports this."""

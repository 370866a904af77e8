"""Training while servers generate: a scheduler of groups of responses, its pace, and the ledger of a run."""

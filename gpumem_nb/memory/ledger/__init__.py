"""The ledger of a step: every allocation and release, and whose bytes they are."""

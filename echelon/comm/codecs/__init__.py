"""Lossy coding of gradients for slow links: docs/compression.md."""

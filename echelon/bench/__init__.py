"""Measurements that users run themselves: `echelon bench`."""

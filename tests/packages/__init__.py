"""Tests of what `make dist` builds, by `make test-dist`."""

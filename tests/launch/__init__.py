"""Tests of gpt3d.launch."""

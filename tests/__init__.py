"""Tests; they mirror gpt3d/."""

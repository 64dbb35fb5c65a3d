"""Compares many models on many datasets: a matrix of runs, and the leaderboard that is made from their folders."""

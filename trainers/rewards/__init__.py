"""Reward functions that come with Loopwright, and how a reward named in a config becomes a callable.

A reward function is sync or async and is called once per group with keyword arguments: the dataset's columns, `prompts`,
`completions` (each a list of messages) and `completion_ids`, every one a list with an entry per rollout. It returns a list with
a number per rollout, or None where it does not apply. Importing this package imports neither math-verify nor aiohttp.
"""

from trainers.rewards.code import code_reward
from trainers.rewards.length import cosine_length_reward, length_reward, overlong_punishment
from trainers.rewards.loading import RewardFunc, load_callable, load_object, reward_name
from trainers.rewards.maths import accuracy_reward
from trainers.rewards.remote import RewardModel
from trainers.rewards.text import exact_match_reward, format_reward, repetition_penalty_reward, text_of

__all__ = [
    "RewardFunc",
    "RewardModel",
    "accuracy_reward",
    "code_reward",
    "cosine_length_reward",
    "exact_match_reward",
    "format_reward",
    "length_reward",
    "load_callable",
    "load_object",
    "overlong_punishment",
    "repetition_penalty_reward",
    "reward_name",
    "text_of",
]

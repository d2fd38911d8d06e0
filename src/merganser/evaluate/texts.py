"""Short texts of several kinds, for a first check of a language model; written for this purpose."""

TEXTS = (
    "The river rises in the hills north of the town, turns twice before it reaches the old bridge, and then runs "
    "straight to the sea. In spring it floods the meadows, and the road to the harbour is closed for a week or two.",
    "Water boils when its vapour pressure equals the pressure of the air above it. On a high mountain the air is "
    "thinner, so water boils at a lower temperature, and it takes longer to cook potatoes.",
    "Question: A baker sells twelve loaves in the morning and nine in the afternoon. Each loaf costs three coins. How "
    "much does she earn in a day? Answer: She sells 12 + 9 = 21 loaves, so she earns 21 * 3 = 63 coins.",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "Dear Anna, thank you for your letter. The meeting has been moved to Thursday at ten, because the room was taken. "
    "Please bring the list of members and the key. Best wishes, Tom",
    "The committee voted on the budget after a long discussion. Seven members were in favour, two against, and one "
    "abstained. The minutes will be published on the first of the month.",
)

"""Prompts from which SmolLM2's answers are asked, to train drafters for it.

    python docs/recipes/prompts.py DATA prompts.jsonl

`DATA` has `prompts/` (GSM8K's training questions, HumanEval, self-instruct's user-oriented
tasks), `corpora/` (`fairy_tales`, `speeches`, `tech_docs`: JSONL of `{"source", "text"}`), and the
test sets (`TEST_SETS`), with which no prompt has 13 words in a row in common.
Writes one `{"prompt", "domain"}` per line, the domains mixed.
"""

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

COUNTS = {
    "math": 4000,
    "chat": 8000,
    "qa": 2500,
    "translation": 2000,
    "summarization": 2000,
    "rag": 2000,
    "instructions": 252,
    "code": 164,
}

TEST_SETS = {  # by file, the field with the question or questions
    "spec_bench/question.jsonl": "turns",
    "prompts/mt_bench_question.jsonl": "turns",
    "prompts/vicuna_bench_question.jsonl": "turns",
    "prompts/gsm8k/test.jsonl": "question",
}
SHARED_WORDS = 13

TOPICS = (
    "bees, volcanoes, the printing press, black holes, the water cycle, recycling, chess, jazz, "
    "sleep, electric cars, the Roman Empire, vaccines, photosynthesis, inflation, remote work, "
    "coral reefs, the French Revolution, machine learning, baking bread, mountain climbing, "
    "public libraries, solar panels, dinosaurs, the human heart, Shakespeare, time management, "
    "bridges, the immune system, impressionist painting, plate tectonics, coffee, the internet, "
    "renewable energy, friendship, a lost dog, the stock market, gravity, DNA, ocean tides, "
    "tea ceremonies, gardening, the Silk Road, robots, a lighthouse keeper, space travel, "
    "city traffic, honesty, winter, a dragon who is afraid of fire, data privacy, democracy, "
    "school uniforms, antibiotics, the Great Wall of China, magnets, thunderstorms, violins, "
    "online shopping, the moon landing, healthy eating, forests, whales, supply and demand, "
    "programming languages, meditation, airports, museums, the history of writing, batteries, "
    "a haunted house, a small bakery, climate change, football, poetry, clocks, glaciers, "
    "satellites, wolves, the Olympic Games, bicycles, taxes, a wise old turtle, trains, "
    "probability, prime numbers, sharks, theatre, a desert island, salt, neural networks, "
    "courage, castles, tourism, spiders, a retired detective, encryption, deserts, sculpture, "
    "video games, hospitals, a broken promise, parliament, maps, nutrition, the periodic table, "
    "earthquakes, a time machine, folk music, startups, sorting algorithms, elephants, glass, "
    "the Industrial Revolution, first aid, a new neighbour, migration, cheese, lightning, hats"
).split(", ")
REQUESTS = (
    "Write a short story about {}.",
    "Explain {} to a ten-year-old child.",
    "Give me five interesting facts about {}.",
    "Write an email to a colleague who wants to know more about {}.",
    "What are the advantages and disadvantages of {}?",
    "Write a poem about {}.",
    "Imagine that you are an expert on {}. What would you tell a beginner first?",
    "Compose a blog post with the title 'What I learned about {}'.",
    "List the most important terms concerning {} and explain each in one sentence.",
    "Write a dialogue between two friends who disagree about {}.",
    "How has our view of {} changed over the last hundred years?",
    "Suggest a lesson plan about {} for a school class.",
    "Compare {} with something else of your choice. What do they have in common?",
    "Write a persuasive speech about {}.",
    "What questions should I ask if I want to understand {}? Answer the first of them.",
    "Pretend to be a reporter and write a short news article about {}.",
    "Write a product description for a book about {}.",
    "Summarize what is known about {} in three paragraphs.",
    "Give me step-by-step advice for someone who writes a report about {}.",
    "What is a common misunderstanding about {}?",
    "Write a Python function that stores facts about {} in a dictionary and prints them.",
    "Describe {} with as many details as you can, and end with a question.",
    "Return a JSON object with the keys 'title', 'keywords' and 'summary' for an article on {}.",
    "How do economists, historians and scientists each look at {}?",
    "Why does {} matter?",
    "Write an outline of an essay about {}.",
    "Invent a riddle whose answer is {}.",
    "Let us play a game: you are a teacher and I ask about {}. Start the lesson.",
    "You are a pirate captain. Tell your crew about {}.",
    "Act as a doctor who is asked about {}, and answer calmly.",
    "Speak as a medieval knight would and describe {}.",
    "Be a sceptical scientist: what would you reply to exaggerated claims about {}?",
    "Stay in the role of a travel guide and make {} sound exciting.",
    "Write a limerick on {}.",
    "Write a letter of complaint that mentions {}.",
    "Write the first paragraph of a novel in which {} plays a part.",
    "Draft a short social media post about {}.",
    "Write three headlines for an article about {}, and choose the best one.",
    "Rewrite this sentence in a formal style: I kind of like {} a lot.",
    "Correct the grammar of this sentence: Me and him was talking on {} yesterday.",
    "Find all nouns in this sentence and return them as a list: My aunt read about {} on a train.",
    "Make a table with three columns that compares three aspects of {}.",
    "Is the following a fact or an opinion? Nothing is more important than {}.",
    "Anna knows twice as much about {} as Ben, and Ben knows more than Carl. Who knows least? Why?",
    "If nobody had ever heard of {}, what would be different today?",
    "Write a JavaScript function that counts how often {} is named in a text.",
    "Write an SQL query that finds all books about {} in a table of a library.",
    "How would you design a web page about {}? Show its HTML.",
    "Write a Python class with two methods that models {}.",
    "How could one measure or count {}? Propose an experiment.",
    "What does a physicist see in {}, and what does a biologist?",
    "Describe how {} changed the economy of a country.",
    "Which laws concern {}, and why were they made?",
    "Which philosophers or writers had something to say on {}?",
    "Prepare me for a quiz: ask four questions with answers on {}.",
    "I have ten minutes to learn about {}. What should I know?",
    "Translate into simple English and explain: an inquiry into the nature of {}.",
    "My friend is bored by {}. How can I change her mind?",
    "Plan a birthday party whose theme is {}.",
    "Give me a recipe, a joke and a proverb that fit {}.",
    "Classify these words into groups: {}, apples, music, thunder, Monday.",
    "What are the risks of {}, and how can they be lowered?",
    "Continue this story: It was raining, and all that Maria could think of was {}.",
    "Argue first for and then against spending public money on {}.",
)

QUESTIONS = (
    (
        "Who invented {}?",
        "the telephone, the light bulb, dynamite, the steam engine, penicillin, "
        "the World Wide Web, the radio, the airplane, the microscope, the sewing machine",
    ),
    (
        "Who wrote {}?",
        "Pride and Prejudice, Hamlet, War and Peace, Moby Dick, Don Quixote, Faust, "
        "The Odyssey, Frankenstein, Dracula, Jane Eyre, Great Expectations, The Time Machine, "
        "Emma, The Divine Comedy, Robinson Crusoe, Gulliver's Travels, Treasure Island, Candide",
    ),
    (
        "What is the capital of {}?",
        "France, Japan, Brazil, Canada, Australia, Egypt, Kenya, Peru, "
        "Norway, Poland, Turkey, India, Mexico, Chile, Greece, Portugal, Thailand, Vietnam, Iran, "
        "Cuba, Nepal, Ghana, Morocco, Finland, Austria, Hungary, Ireland, Iceland, Spain, Italy",
    ),
    (
        "When did {} end?",
        "the First World War, the American Civil War, the Cold War, the Ice Age, "
        "the Middle Ages, the Great Depression, the Renaissance, the Korean War, Prohibition",
    ),
    (
        "Where is {} located?",
        "the Eiffel Tower, Machu Picchu, the Taj Mahal, Mount Everest, "
        "Lake Victoria, the Amazon river, Petra, Stonehenge, the Sahara, the Grand Canyon, Niagara "
        "Falls, the Dead Sea, Mount Fuji, the Louvre, the Panama Canal, the Kremlin, Angkor Wat",
    ),
    ("What is the chemical symbol of {}?", "gold, silver, iron, oxygen, sodium, lead, copper, tin"),
    (
        "How many {}?",
        "planets are there in the solar system, bones does an adult human have, days "
        "are in a leap year, states are in the United States, legs does a spider have, players "
        "are in a soccer team, strings does a violin have, continents are there, keys does a piano "
        "have",
    ),
    (
        "What is {} used for?",
        "a barometer, a stethoscope, a catalyst, a compiler, chlorophyll, "
        "insulin, a sextant, a transistor, a prism, a telescope, yeast, a firewall, an anvil",
    ),
    (
        "Who was {}?",
        "Marie Curie, Julius Caesar, Cleopatra, Isaac Newton, Ada Lovelace, Mozart, "
        "Abraham Lincoln, Leonardo da Vinci, Galileo Galilei, Charles Darwin, Napoleon Bonaparte, "
        "Aristotle, Joan of Arc, Nikola Tesla, Florence Nightingale, Alan Turing, Confucius",
    ),
    (
        "What does {} mean?",
        "photosynthesis, democracy, inflation, osmosis, irony, metaphor, GDP, "
        "hypothesis, monarchy, evaporation, biodiversity, algorithm, latitude, vaccine, symmetry",
    ),
    (
        "What is the difference between {}?",
        "a crocodile and an alligator, weather and climate, "
        "a virus and a bacterium, speed and velocity, a lake and a pond, a planet and a star, "
        "mass and weight, a frog and a toad, a list and a tuple in Python, jam and jelly",
    ),
    (
        "How does {} work?",
        "a refrigerator, a microwave oven, a jet engine, a solar cell, a search engine, a vaccine, "
        "a lock on a canal, a hard disk, a telescope, an election, a lighthouse, a mortgage, "
        "radar, a thermometer, the human eye, a nuclear reactor, GPS, a printing press, "
        "a parachute",
    ),
    (
        "Where does {} come from?",
        "the word salary, chocolate, coffee, rubber, petroleum, the marathon, pizza, silk, "
        "the name Wednesday, cinnamon, the tango, the tradition of the Christmas tree, amber, tea, "
        "the idea of zero, most of the world's gold, the game of chess, the potato, porcelain",
    ),
    (
        "When was {} founded?",
        "the United Nations, Rome, the Red Cross, Harvard University, the European Union, NASA, "
        "the city of New York, the Royal Society, the Nobel Prize, the British Museum, Singapore, "
        "the World Health Organization, the Bank of England, Microsoft, the Olympic Committee",
    ),
    (
        "Which country has {}?",
        "the largest population, the most lakes, the longest coast, the highest mountain, "
        "the oldest parliament, the most time zones, the largest desert, the longest wall, "
        "the most islands, the smallest area, the most official languages, no army, two capitals",
    ),
)
QUESTION_ENDINGS = ("", " Answer in one sentence.", " Explain briefly.", " Give an example.")

GERMAN_SUBJECTS = (
    "Die Regierung|Der Präsident|Die Polizei|Das Unternehmen|Die Stadt|Ein Sprecher|Die Firma|"
    "Der Minister|Die Forscher|Die Bank|Der Verein|Die Schule|Das Gericht|Die Universität|"
    "Der Bürgermeister|Die Partei|Das Krankenhaus|Die Bewohner|Die Zeitung|Eine Studie|"
    "Der Trainer|Die Europäische Union|Das Ministerium|Die Opposition|Ein Zeuge"
).split("|")
GERMAN_TIMES = (
    "am Montag|am Dienstag|gestern|in der vergangenen Woche|nach langen Verhandlungen|im Sommer|"
    "vor zwei Jahren|am frühen Morgen|zum ersten Mal|trotz der Kritik|wegen des schlechten Wetters|"
    "in Berlin|in einem Interview|nach dem Unfall|kurz vor der Wahl"
).split("|")
GERMAN_VERBS = (
    "hat {} einen neuen Plan vorgestellt|hat {} die Ergebnisse veröffentlicht|"
    "hat {} mehr als tausend Menschen geholfen|hat {} vor steigenden Preisen gewarnt|"
    "hat {} eine Untersuchung angekündigt|hat {} den Vertrag unterschrieben|"
    "hat {} das alte Gebäude verkauft|hat {} auf die Vorwürfe geantwortet|"
    "wird {} über das Gesetz abstimmen|wird {} eine neue Brücke bauen|"
    "wird {} die Kosten senken müssen|konnte {} die Ursache nicht klären|"
    "musste {} die Veranstaltung absagen|wollte {} sich dazu nicht äußern|"
    "hat {} drei Millionen Euro für die Forschung bekommen|"
    "hat {} das Spiel mit zwei zu eins verloren"
).split("|")
GERMAN_ENDINGS = (
    ".| , wie es in einer Mitteilung heißt .| , obwohl viele Bürger dagegen sind .| , sagte sie .|"
    " , um die Sicherheit zu verbessern .| , weil das Geld fehlt .| , während die Zahl der "
    "Touristen steigt .| und rechnet mit einem guten Ergebnis .| , aber die Arbeit dauert noch an ."
).split("|")


def prompts(data: Path, rng: random.Random) -> Iterator[tuple[str, str]]:
    """All candidate prompts as (domain, prompt)."""
    for question in _lines(data / "prompts/gsm8k/train.jsonl"):
        yield "math", question["question"]
    for task in _lines(data / "prompts/self_instruct_user_oriented.jsonl"):
        yield "instructions", f"{task['instruction']}\n{task['instances'][0]['input']}".strip()
    for task in _lines(data / "prompts/HumanEval.jsonl"):
        yield "code", f"Complete this Python function:\n{task['prompt']}"
    for request, topic in itertools.product(REQUESTS, TOPICS):
        yield "chat", request.format(topic)
    for (question, names), ending in itertools.product(QUESTIONS, QUESTION_ENDINGS):
        for name in names.split(", "):
            yield "qa", question.format(name) + ending
    for words in itertools.product(GERMAN_SUBJECTS, GERMAN_TIMES, GERMAN_VERBS, GERMAN_ENDINGS):
        subject, time, verb, ending = words
        subject = subject[0].lower() + subject[1:]
        sentence = f"{time[0].upper()}{time[1:]} {verb.format(subject)}{ending}"
        yield "translation", f"Translate German to English: {sentence}"
    for corpus in ("fairy_tales", "speeches", "tech_docs"):
        for document in _lines(data / "corpora" / corpus / "train.jsonl"):
            if re.search("Peter-Pan|Alice", document["source"]):  # not to be shipped everywhere
                continue
            for passage in _passages(document["text"], rng):
                names = re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", passage) or ["the author"]
                name = max(sorted(set(names)), key=names.count)
                question = rng.choice(
                    (
                        f"What does the text say about {name}?",
                        f"Who or what is {name}?",
                        "What happens in this passage?",
                        f"Why is {name} mentioned?",
                        "What is the main point of this text?",
                    )
                )
                yield "summarization", f"Summarize: {passage}"
                yield "rag", f"{passage}\n{question}"


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _passages(text: str, rng: random.Random) -> Iterator[str]:
    """Runs of whole paragraphs of about 300 to 1,800 characters."""
    passage, length = "", rng.randint(300, 1800)
    for paragraph in re.split(r"\n\s*\n", text):
        passage = f"{passage} {' '.join(paragraph.split())}".strip()
        if len(passage) >= length:
            if len(passage) < 2500:
                yield passage
            passage, length = "", rng.randint(300, 1800)


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    """All `SHARED_WORDS` words in a row; of a shorter text all its words."""
    words = re.findall(r"\w+", text.lower())
    num_runs = max(len(words) - SHARED_WORDS, 0) + 1
    return {tuple(words[i : i + SHARED_WORDS]) for i in range(num_runs)}


def tested(data: Path) -> set[tuple[str, ...]]:
    """The runs of words of all test sets."""
    found = set()
    for name, field in TEST_SETS.items():
        for line in _lines(data / name):
            texts = [line[field]] if isinstance(line[field], str) else line[field]
            found |= set().union(*map(runs_of_words, texts))
    return found


def main(data: str, out: str):
    """Writes the file, and prints how many candidates each domain has."""
    rng = random.Random(0)
    by_domain: dict[str, list[str]] = {domain: [] for domain in COUNTS}
    for domain, prompt in prompts(Path(data), rng):
        by_domain[domain].append(prompt)
    chosen = [
        {"prompt": prompt, "domain": domain}
        for domain, count in COUNTS.items()
        for prompt in rng.sample(by_domain[domain], min(count, len(by_domain[domain])))
    ]
    rng.shuffle(chosen)
    test_sets = tested(Path(data))
    chosen = [line for line in chosen if not runs_of_words(line["prompt"]) & test_sets]
    with open(out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in chosen)
    print({domain: len(found) for domain, found in by_domain.items()}, len(chosen), "written")


if __name__ == "__main__":
    main(*sys.argv[1:])

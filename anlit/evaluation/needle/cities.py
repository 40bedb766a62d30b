"""Names of cities for the needle task. Their order must not change: it decides which pairs are held out."""

CITIES = (
    "Aarhus", "Accra", "Adelaide", "Algiers", "Almaty", "Amman", "Amsterdam", "Ankara", "Antwerp", "Athens",
    "Auckland", "Baku", "Bangkok", "Barcelona", "Basel", "Beirut", "Belgrade", "Bergen", "Berlin", "Bern",
    "Bilbao", "Bogota", "Bologna", "Bordeaux", "Boston", "Bratislava", "Bremen", "Brisbane", "Bristol", "Brussels",
    "Bucharest", "Budapest", "Cairo", "Calgary", "Canberra", "Caracas", "Cardiff", "Chicago", "Cologne", "Copenhagen",
    "Cordoba", "Cork", "Dakar", "Dallas", "Damascus", "Delhi", "Denver", "Detroit", "Doha", "Dortmund",
    "Dresden", "Dubai", "Dublin", "Durban", "Edinburgh", "Florence", "Geneva", "Genoa", "Ghent", "Glasgow",
    "Granada", "Graz", "Hamburg", "Hanoi", "Havana", "Helsinki", "Houston", "Istanbul", "Jakarta", "Kabul",
    "Kampala", "Karachi", "Kigali", "Kingston", "Krakow", "Kyoto", "Lagos", "Leeds", "Leipzig", "Lima",
    "Lisbon", "Liverpool", "London", "Lyon", "Madrid", "Malaga", "Manila", "Marseille", "Melbourne", "Memphis",
    "Miami", "Milan", "Montreal", "Moscow", "Mumbai", "Munich", "Nairobi", "Nantes", "Naples", "Nice",
    "Osaka", "Oslo", "Oxford", "Palermo", "Paris", "Perth", "Porto", "Prague", "Quito", "Riga",
    "Rome", "Rotterdam", "Salzburg", "Seattle", "Seoul", "Seville", "Sofia", "Stockholm", "Sydney", "Tallinn",
    "Tokyo", "Toronto", "Trieste", "Tunis", "Turin", "Valencia", "Vienna", "Vilnius", "Warsaw", "Zurich",
)  # fmt: skip

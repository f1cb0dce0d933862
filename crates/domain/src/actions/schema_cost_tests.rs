use serde_json::json;

use super::*;

/// Cost of a check with patterns that look at each byte once.
fn cost_of_check(schema: &Value, input: &Value) -> Result<(), SchemaProblem> {
    let states = patterns(schema).into_iter().map(|pattern| (pattern.to_owned(), 0)).collect();
    super::cost_of_check(schema, input, &states)
}

/// `levels` definitions, each of which refers `width` times to the one below.
fn doubling(levels: usize, width: usize) -> Value {
    let mut definitions = Map::new();
    definitions.insert("a0".to_owned(), json!({ "type": "object" }));
    for level in 1..=levels {
        let reference = json!({ "$ref": format!("#/$defs/a{}", level - 1) });
        definitions.insert(format!("a{level}"), json!({ "allOf": vec![reference; width] }));
    }
    json!({ "$ref": format!("#/$defs/a{levels}"), "$defs": definitions })
}

#[test]
fn references_that_multiply_are_refused() {
    assert_eq!(weigh(&doubling(5, 2)), Ok(()));
    for (levels, width) in [(24, 2), (40, 2), (12, 4)] {
        let schema = doubling(levels, width);
        assert!(schema.to_string().len() < 3000);
        assert_eq!(weigh(&schema), Err(SchemaProblem::TooLarge), "{levels} levels of {width}");
    }
    assert_eq!(cost_of_check(&doubling(40, 2), &json!({})), Err(SchemaProblem::CheckTooExpensive));
}

#[test]
fn circles_are_counted_with_the_input() {
    let tree = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string" },
            "left": { "$ref": "#" },
            "right": { "$ref": "#" },
            "more": { "type": "array", "items": { "$ref": "#" } },
        },
    });
    let twice = json!({ "anyOf": [
        { "properties": { "a": { "$ref": "#" } } },
        { "properties": { "a": { "$ref": "#" } } },
    ] });
    let (mut deep, mut plain) = (json!({}), json!({}));
    for _ in 0..40 {
        plain = json!({ "name": "n", "left": plain, "more": [{ "name": "m" }, {}] });
        deep = json!({ "a": deep });
    }
    assert_eq!((weigh(&tree), cost_of_check(&tree, &plain)), (Ok(()), Ok(())));
    assert_eq!(weigh(&twice), Ok(()));
    assert_eq!(cost_of_check(&twice, &json!({ "a": { "a": {} } })), Ok(()));
    assert_eq!(cost_of_check(&twice, &deep), Err(SchemaProblem::CheckTooExpensive));
    let nowhere = json!({ "allOf": [{ "$ref": "#" }] });
    assert_eq!(cost_of_check(&nowhere, &json!({})), Err(SchemaProblem::TooDeep));
}

#[test]
fn repeated_work_on_one_value_is_counted() {
    let words: Vec<_> = (0..5000).collect();
    let list = json!({ "items": { "enum": words } });
    let numbers: Vec<_> = (0..5000).collect();
    assert_eq!(cost_of_check(&list, &json!([1, 2, 3])), Ok(()));
    assert_eq!(cost_of_check(&list, &json!(numbers)), Err(SchemaProblem::CheckTooExpensive));
    let strict = json!({ "allOf": vec![json!({ "properties": { "a": true } }); 200], "unevaluatedProperties": false });
    let properties: Map<_, _> = (0..5000).map(|n| (format!("p{n}"), Value::Null)).collect();
    assert_eq!(cost_of_check(&strict, &json!({ "a": 1 })), Ok(()));
    assert_eq!(cost_of_check(&strict, &Value::Object(properties)), Err(SchemaProblem::CheckTooExpensive));
}

#[test]
fn patterns_are_bounded_in_number_and_length() {
    let many: Map<_, _> =
        (0..=MAX_PATTERNS).map(|n| (format!("p{n}"), json!({ "pattern": format!("^{n}") }))).collect();
    assert_eq!(weigh(&json!({ "properties": many })), Err(SchemaProblem::TooManyPatterns));
    let long = "a".repeat(MAX_PATTERN_BYTES + 1);
    assert_eq!(weigh(&json!({ "patternProperties": { long: {} } })), Err(SchemaProblem::PatternTooLong));
}

#[test]
fn references_stay_within_the_schema() {
    let schema = |reference: &str| {
        json!({
            "$id": "https://example.org/order",
            "properties": { "a": { "$ref": reference } },
            "$defs": { "a b": { "$anchor": "word", "type": "string" } },
        })
    };
    for known in ["#", "#/$defs/a%20b", "#word", "https://example.org/order#word"] {
        assert_eq!(weigh(&schema(known)), Ok(()), "{known}");
    }
    for unknown in ["#/$defs/b", "#other", "https://example.org/other", "other.json"] {
        assert_eq!(weigh(&schema(unknown)), Err(SchemaProblem::UnknownReference(unknown.to_owned())));
    }
}

proptest::proptest! {
    /// Neither function runs away or panics, whatever the keywords.
    #[test]
    fn every_schema_ends(
        names in proptest::collection::vec(
            proptest::sample::select(&["allOf", "anyOf", "items", "properties", "not", "$ref", "enum", "$defs"][..]),
            1..12,
        ),
        width in 1..4_usize,
    ) {
        let mut schema = json!({ "$ref": "#" });
        for name in names {
            let parts = vec![schema.clone(); width];
            schema = match name {
                "$ref" => json!({ "$ref": "#/not", "not": schema }),
                "properties" | "$defs" => json!({ name: { "a": schema.clone(), "b": schema } }),
                "items" | "not" => json!({ name: schema }),
                list => json!({ list: parts }),
            };
        }
        let _ = weigh(&schema);
        let _ = cost_of_check(&schema, &json!({ "a": [{ "b": {} }, 7], "b": "text" }));
    }
}

#[test]
fn the_states_of_patterns_are_counted() {
    let states = PatternStates::from([("x{1600}".to_owned(), 1600), ("x".to_owned(), 0)]);
    let cost = |schema: Value, input: Value| super::cost_of_check(&schema, &input, &states);
    let (text, name) = ("x".repeat(700_000), "x".repeat(1000));
    assert_eq!(cost(json!({ "pattern": "x" }), json!(text)), Ok(()));
    assert_eq!(cost(json!({ "pattern": "x{1600}" }), json!("x".repeat(2000))), Ok(()));
    assert_eq!(cost(json!({ "pattern": "x{1600}" }), json!(text)), Err(SchemaProblem::CheckTooExpensive));
    assert_eq!(cost(json!({ "pattern": "unmeasured" }), json!("x")), Err(SchemaProblem::CheckTooExpensive));
    let names = json!({ "patternProperties": { "x{1600}": {} } });
    let strict = json!({ "patternProperties": { "x{1600}": {} }, "additionalProperties": false });
    let properties = |count: usize| (0..count).map(|n| (format!("{name}{n}"), json!(1))).collect::<Map<_, _>>();
    assert_eq!(cost(names.clone(), properties(2).into()), Ok(()));
    assert_eq!(cost(strict, properties(2).into()), Err(SchemaProblem::CheckTooExpensive));
    assert_eq!(cost(names, properties(3).into()), Err(SchemaProblem::CheckTooExpensive));
}
